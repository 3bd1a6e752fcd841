"""Parts of scripts/audit_upstream.py."""

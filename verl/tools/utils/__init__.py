"""Loading of tools, execution pools, connections to MCP servers."""

"""Agent loops, their tools, interactions and environments, and the gateway for programs of users."""

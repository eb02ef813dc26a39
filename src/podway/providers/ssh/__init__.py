"""Your own machines over ssh, from pools in a file."""

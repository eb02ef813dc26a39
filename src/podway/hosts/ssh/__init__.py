"""Hosts reached over ssh: the connections to them, the program sent there, and the file that makes `ssh NAME` work."""

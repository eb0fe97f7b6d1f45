"""Who may talk to the server, how much, and over which wire."""

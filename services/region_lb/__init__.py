"""The regional tier: picks a cluster of its region by expected wait and by where the session's prefix is."""

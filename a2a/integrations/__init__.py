"""integrations: other people's calling conventions, one room or file each.

Owns nothing itself. Refuses to import any engine: each adapter looks for its engine only when that engine calls it.
"""

"""RG: everything about this member."""

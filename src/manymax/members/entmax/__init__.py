"""Alpha-entmax: everything about this member."""

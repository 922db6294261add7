"""Taylor-softmax: everything about this member."""

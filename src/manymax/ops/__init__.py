"""Numerical building blocks of the losses: functions on tensors that know nothing of any loss."""

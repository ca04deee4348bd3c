"""Low-level operators: a plain reference beside each fast one."""

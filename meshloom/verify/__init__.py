"""A plan against one device, parameter by parameter."""

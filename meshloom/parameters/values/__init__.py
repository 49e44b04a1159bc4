"""How a model is described without the values of its parameters, and where these come from."""

def shown(loader):
    """A loader with nothing around it where there is no terminal."""
    yield from loader

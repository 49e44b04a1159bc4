"""Clusters that are not here: devices, links, fabric and price from files, and the seconds of operators and collectives on them."""

"""Which rank holds which parameters: shards along tp, owners along pp."""

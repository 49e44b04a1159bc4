"""Which rank holds which parameters, along tp and pp."""

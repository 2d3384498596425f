"""FlexGen: the linear program of an offloading policy."""

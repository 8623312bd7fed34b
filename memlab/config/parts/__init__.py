"""The parts that layers are made of, one file each."""

"""Planning: what a measured step would be on 1 to 1,024 devices."""

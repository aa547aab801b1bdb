"""Other frameworks: what they need of mirror, and what mirror needs of them."""

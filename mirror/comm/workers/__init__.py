"""Other processes of one training: how they exchange what concerns all of them."""

"""``mirror check``: does a script train under a strategy as it does on one device?"""

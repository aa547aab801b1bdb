"""Variables whose truth is a storage of its own, on the parameter device."""

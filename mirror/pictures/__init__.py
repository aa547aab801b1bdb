"""Pictures: traces and reports for people to look at."""

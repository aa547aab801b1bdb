"""Tools above the package: the doctor, the planner, the demo."""

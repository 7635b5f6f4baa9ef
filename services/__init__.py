"""The services of the fleet. Each imports `flowfleet`, never another service."""

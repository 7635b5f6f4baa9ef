"""Model families, a file each; `flowfleet.models.registry` lists them. Import the modules, not this package."""

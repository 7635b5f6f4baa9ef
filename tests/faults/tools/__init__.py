"""What faults are made with: clocks, disks, lost networks, and switches that rewards look at."""

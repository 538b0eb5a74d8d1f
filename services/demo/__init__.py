"""Three regions on this machine, as separate processes, with traffic: `headwater demo`."""

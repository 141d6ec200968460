"""Plans before a run: what is stored, what a schedule costs, where memory goes. No devices are needed."""

"""State of the engines as the page shows it: the event log folded into one state, with its changes."""

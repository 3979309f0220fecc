"""What a page shows of engines at work: the event log, folded into one state, and what changed of it."""

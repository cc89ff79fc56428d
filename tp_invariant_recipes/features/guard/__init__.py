"""guard=…: notice silent data corruption while a run trains, and name the rank."""

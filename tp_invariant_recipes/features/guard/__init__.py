"""guard=…: notice broken hardware while a run trains, and name the rank."""

"""What notices broken hardware while a run trains (docs/guard.md): four nets, one judge, one message."""

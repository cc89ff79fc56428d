"""How commands print: long lists, the progress of slow commands, help texts."""

"""Where stage machines come from, and the promise that none of them stays."""

"""Reports: what happened, or would happen, as a picture."""

"""How much kinds of layers slow each other down on one device: measured, kept as a table, used to predict sharing."""

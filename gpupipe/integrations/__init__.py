"""What a trainer needs beyond the plain loader: one module a trainer, imported by its full name; each needs that trainer."""

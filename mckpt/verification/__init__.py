"""Do two checkpoints compute the same? Levels, the judge, and the page that shows the verdict."""

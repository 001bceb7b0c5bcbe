"""Pure functions on arrays: losses, samplers and distances, each with its equation and source. Imports nothing of ours."""

"""From data to the loss to use: a search of every candidate with the same effort, in a given time.

The files: `candidates.toml` (the losses and what is searched of each), `candidates` (which of them fit the data),
`timing` (how long an epoch of each takes here), `effort` (how many trials, epochs and seeds the time allows), `plan`
(all of this as a file, written before anything starts), `clock` (the time that was spent, and what was decided),
`rounds` (carries out a plan), `verdict` (what there is to say at the end).
"""

"""One file per raw format; each turns files into `Interactions`."""

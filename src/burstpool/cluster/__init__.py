"""The pool's machines: what a cluster consists of (`spec`), what its devices can do (`catalogue`), and what
this machine turns out to have (`detect`, by the measurements of `measure`)."""

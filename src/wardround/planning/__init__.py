"""Planning: what a run will take, before it is started."""

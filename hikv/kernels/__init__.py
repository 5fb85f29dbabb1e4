"""The launchers themselves, for people who want one kernel and no policy."""

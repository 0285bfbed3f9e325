"""The faults that `polyclinic.data.check` looks for, by where they show."""

"""The faults that `polyclinic.data.check` reports, one module for each kind of object that can be faulty."""

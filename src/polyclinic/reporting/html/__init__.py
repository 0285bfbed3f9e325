"""The report as one HTML file: elements, SVG plots, style sheet, PDF."""

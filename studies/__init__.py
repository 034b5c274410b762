"""The paper's figures as small studies: many short runs, their spread over seeds, and plots, by `bapo reproduce`."""

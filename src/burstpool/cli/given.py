"""Which options stand on the command line, rather than have their defaults."""

import typer


def given_options(context: typer.Context) -> dict[str, str]:
    """Parameter → how its option is written, of those that the user gave."""
    written = {parameter.name: parameter.opts[0] for parameter in context.command.params if parameter.name}
    sources = {name: context.get_parameter_source(name) for name in written}
    return {
        name: written[name] for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"
    }

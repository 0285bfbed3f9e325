#!/bin/sh
# First start: installs the exact versions of requirements.txt into .venv beside this file. Every start: @{purpose}.
# With --install it only installs.
set -eu
cd "$(dirname "$0")"
umask 077
chmod 600 @{key}
if [ ! -e .venv/polyclinic-@{version} ]; then
    python=${PYTHON:-python3}
    "$python" -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else
"polyclinic needs Python 3.11 or newer; install one, then: PYTHON=/path/to/python3.11 sh start.sh")'
    "$python" -m venv .venv
    .venv/bin/python -m pip install --disable-pip-version-check -r requirements.txt -c constraints.txt
    touch .venv/polyclinic-@{version}
fi
[ "${1:-}" != --install ] || exit 0
export POLYCLINIC_CACHE="${POLYCLINIC_CACHE:-$PWD/state/cache}"
case "${1:-}" in
approve | allow-round) # at a site: sh start.sh approve RECIPE.yaml
    word=$1
    shift
    exec .venv/bin/polyclinic site "$word" site.yaml "$@"
    ;;
esac
exec .venv/bin/polyclinic @{command} "$@"

function __tpi_complete
    set -l answer (_TPI_COMPLETE=fish _TPI_LINE=(commandline -cp | string collect) tpi 2>/dev/null)
    printf '%s\n' $answer[2..-1]
    if test "$answer[1]" = files
        set -l word (commandline -ct)
        set -l key (string match -r '^[^=]*=' -- $word)
        for file in (__fish_complete_path (string replace -r '^[^=]*=' '' -- $word))
            printf '%s%s\n' "$key" $file
        end
    end
end
complete --command tpi --no-files --keep-order --arguments '(__tpi_complete)'
